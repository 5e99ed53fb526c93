"""AutoBNN's search: the widths of a network by evolution, under a FLOPs budget. See ``unflip methods autobnn``.

A study lives in a folder:

    w-1-0.5-2/           a candidate: its run, as of ``train``, and fitness.json, written last
    search.json          options, every candidate, the best of each generation
    table.md             the candidates, best first

Candidates depend only on the seed and on the fitness of earlier ones. So a search that was killed makes the same
candidates again, and skips those that are finished.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unflip import models
from unflip.cost import cost
from unflip.data import Dataset
from unflip.recipes.build import build_model
from unflip.recipes.schema import Recipe
from unflip.runs.files import read_json, write_atomically, write_json
from unflip.train.job import RunOptions
from unflip.train.loop import TrainingStopped, train

Widths = tuple[float, ...]
Fitness = Callable[[Recipe, Path], float]  # of a recipe with widths, and the candidate's folder

NEW_TRIES = 100  # attempts to make a candidate that has not been evaluated yet


@dataclass(frozen=True)
class Search:
    """Options of the evolution. ``budget`` is FLOPs over those of the network without ``widths``."""

    population: int = 8
    generations: int = 5  # after the first population
    budget: float = 1.0
    candidates: Widths = (0.5, 1, 2, 3, 4)
    crossover: float = 0.8  # probability that a child has two parents
    mutation: float = 0.2  # probability of each factor
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"autobnn: {name}={value!r} should be a whole number >= {least}")
        for name in ("crossover", "mutation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"autobnn: {name}={getattr(self, name)} should be a probability")
        if not 0 < self.budget < math.inf:
            raise ValueError(f"autobnn: budget={self.budget} should be a number > 0")
        if not self.candidates or not all(0 < c < math.inf for c in self.candidates):
            raise ValueError(f"autobnn: candidates={self.candidates} should be numbers > 0")


@dataclass(frozen=True)
class Candidate:
    """One evaluated network; ``fitness`` is None if its training stopped."""

    widths: Widths
    generation: int
    flops: float
    flops_ratio: float
    memory_bits: int
    fitness: float | None
    stopped: str | None = None

    @property
    def rank(self) -> tuple[float, float, Widths]:
        """Sorts the best first; of equals, the cheapest."""
        return (math.inf if self.fitness is None else -self.fitness, self.flops, self.widths)


@dataclass(frozen=True)
class Found:
    """Every candidate, best first, and the best one after each generation, counting the first population as one."""

    candidates: tuple[Candidate, ...]
    best: tuple[Candidate, ...]


def search_widths(
    recipe: Recipe,
    data: Dataset,
    out: Path,
    *,
    search: Search | None = None,
    fitness: Fitness | None = None,
    device: str | None = None,
) -> Found:
    """Search the widths of the recipe's network. Candidates finished in ``out`` are not evaluated again.

    The default ``fitness`` is the accuracy on held-out training images after the recipe's epochs; if the recipe holds
    none out, a tenth of them. Higher is better. Candidates that raise ``TrainingStopped`` come last.
    """
    search = search or Search()
    if models.width_parts(recipe.model.name) == 0:
        able = ", ".join(n for n in models.names() if models.width_parts(n))
        raise ValueError(
            f"autobnn: model {recipe.model.name!r} has no widths to search; models that have: {able}"
        )
    if recipe.start:
        raise ValueError(
            f"autobnn: recipe {recipe.name!r} starts from {recipe.start!r}, whose weights do not fit other widths: "
            "give a recipe without start"
        )
    if recipe.data.validation == 0:
        held_out = recipe.data.model_copy(update={"validation": len(data) // 10})
        recipe = recipe.model_copy(update={"data": held_out})
    return _Evolution(recipe, data, out, search, fitness or _trained(data, device)).run()


def _trained(data: Dataset, device: str | None) -> Fitness:
    def accuracy(recipe: Recipe, folder: Path) -> float:
        [result] = train(recipe, data, folder, options=RunOptions(device=device))
        return float(result["accuracy"])

    return accuracy


def _with_widths(recipe: Recipe, widths: Widths | None) -> Recipe:
    chosen = {"name": recipe.model.name, **recipe.model.options}
    chosen["widths"] = None if widths is None else list(widths)
    return recipe.model_copy(update={"model": type(recipe.model)(**chosen)})


class _Evolution:
    def __init__(
        self, recipe: Recipe, data: Dataset, out: Path, search: Search, fitness: Fitness
    ) -> None:
        self.recipe, self.data, self.out = recipe, data, out
        self.search, self.fitness = search, fitness
        self.levels = sorted(set(search.candidates))
        self.parts = models.width_parts(recipe.model.name)
        self.random = random.Random(search.seed)
        self.costs: dict[Widths | None, tuple[float, int]] = {}
        self.seen: dict[Widths, Candidate] = {}
        self.best: list[Candidate] = []
        smallest = (self.levels[0],) * self.parts
        if self.ratio(smallest) > search.budget:
            raise ValueError(
                f"autobnn: budget={search.budget} is below the smallest network's {self.ratio(smallest):.3f}: "
                f"{recipe.model.name} with widths {list(smallest)}. Give a larger budget or smaller candidates"
            )

    def run(self) -> Found:
        population = self.first_population()
        for generation in range(self.search.generations + 1):
            children = population if generation == 0 else self.children(population)
            evaluated = [self.evaluate(widths, generation) for widths in children]
            pool = {c.widths: c for c in [*(self.seen[w] for w in population), *evaluated]}
            fittest = sorted(pool.values(), key=lambda c: c.rank)[: self.search.population]
            population = [c.widths for c in fittest]
            self.best.append(fittest[0])
            _write(self.found(), self.recipe, self.search, self.out)
        return self.found()

    def found(self) -> Found:
        return Found(tuple(sorted(self.seen.values(), key=lambda c: c.rank)), tuple(self.best))

    def counted(self, widths: Widths | None) -> tuple[float, int]:
        """FLOPs and memory in bits."""
        if widths not in self.costs:
            spec = self.data.spec
            with torch.device("meta"):  # only shapes matter
                model = build_model(_with_widths(self.recipe, widths), spec, seed=0)
                spent = cost(model, torch.empty(1, *spec.shape))
            self.costs[widths] = (spent.flops, spent.memory_bits)
        return self.costs[widths]

    def ratio(self, widths: Widths) -> float:
        return self.counted(widths)[0] / self.counted(None)[0]

    def first_population(self) -> list[Widths]:
        uniform = [(level,) * self.parts for level in self.levels]
        population = [[w for w in uniform if self.ratio(w) <= self.search.budget][-1]]
        while len(population) < self.search.population:
            widths = self.new(self.drawn, population)
            if widths is None:  # there are no more
                break
            population.append(widths)
        return population

    def children(self, population: Sequence[Widths]) -> list[Widths]:
        children: list[Widths] = []
        for _ in range(self.search.population):
            child = self.new(lambda: self.child(population), [*self.seen, *children])
            if child is not None:
                children.append(child)
        return children

    def new(self, make: Callable[[], Widths], known: Sequence[Widths]) -> Widths | None:
        """A new candidate within the budget; None if every attempt gave a known one."""
        for _ in range(NEW_TRIES):
            widths = self.fitted(make())
            if widths not in known:
                return widths
        return None

    def drawn(self) -> Widths:
        return tuple(self.random.choice(self.levels) for _ in range(self.parts))

    def child(self, population: Sequence[Widths]) -> Widths:
        mother, father = self.parent(population), self.parent(population)
        if self.random.random() >= self.search.crossover:
            father = mother
        genes = [self.random.choice(pair) for pair in zip(mother, father, strict=True)]
        mutated = [self.random.random() < self.search.mutation for _ in genes]
        return tuple(
            self.random.choice(self.levels) if m else g for g, m in zip(genes, mutated, strict=True)
        )

    def parent(self, population: Sequence[Widths]) -> Widths:
        """The fitter of two; a population is sorted."""
        return population[min(self.random.randrange(len(population)) for _ in range(2))]

    def fitted(self, widths: Widths) -> Widths:
        """Reduce random factors to the next smaller ones until the network is within the budget."""
        genes = list(widths)
        while self.ratio(tuple(genes)) > self.search.budget:
            part = self.random.choice([i for i, g in enumerate(genes) if g > self.levels[0]])
            genes[part] = self.levels[self.levels.index(genes[part]) - 1]
        return tuple(genes)

    def evaluate(self, widths: Widths, generation: int) -> Candidate:
        flops, memory_bits = self.counted(widths)
        value, stopped = None, None
        try:
            value = self.remembered_fitness(widths)
        except TrainingStopped as stop:
            stopped = str(stop)
        found = Candidate(
            widths, generation, flops, self.ratio(widths), memory_bits, value, stopped
        )
        self.seen[widths] = found
        return found

    def remembered_fitness(self, widths: Widths) -> float:
        name = "w-" + "-".join(f"{w:g}" for w in widths)
        chosen = _with_widths(self.recipe, widths)
        chosen = chosen.model_copy(update={"name": f"{self.recipe.name}-{name}"})
        note, images = self.out / name / "fitness.json", self.data.fingerprint
        if note.exists():
            saved = read_json(note, "recipe", "fitness", "images")
            if saved["recipe"] != chosen.plain():
                raise ValueError(
                    f"{note.parent} was evaluated with another recipe; choose another folder or remove it"
                )
            if saved["images"] != images:
                raise ValueError(
                    f"{note.parent} was evaluated on other images: {saved['images']}, these are {images}; choose "
                    "another folder or remove it"
                )
            return float(saved["fitness"])
        note.parent.mkdir(parents=True, exist_ok=True)
        value = float(self.fitness(chosen, note.parent))
        if not math.isfinite(value):
            raise TrainingStopped(f"its fitness is {value}")
        write_json(note, {"fitness": value, "recipe": chosen.plain(), "images": images})
        return value


def _write(found: Found, recipe: Recipe, search: Search, out: Path) -> None:
    summary = {
        "recipe": recipe.plain(),
        "search": dataclasses.asdict(search),
        "candidates": [dataclasses.asdict(c) for c in found.candidates],
        "best_of_generation": [list(c.widths) for c in found.best],
    }
    write_json(out / "search.json", summary)
    write_atomically(out / "table.md", table(found, recipe, search).encode())


def table(found: Found, recipe: Recipe, search: Search) -> str:
    """The candidates as Markdown, best first."""
    lines = [
        f"{recipe.model.name} on {recipe.data.name}, {recipe.epochs} epochs per candidate, at most {search.budget:g} × "
        f"the FLOPs, seed {search.seed}; accuracy on {recipe.data.validation} held-out training images.\n",
        "| widths | accuracy, % | FLOPs, M | × | memory, Kbit | generation |",
        "|---|---|---|---|---|---|",
    ]
    for c in found.candidates:
        value = f"stopped: {c.stopped}" if c.fitness is None else f"{c.fitness:.2f}"
        lines.append(
            f"| {', '.join(f'{w:g}' for w in c.widths)} | {value} | {c.flops / 1e6:,.2f} | {c.flops_ratio:.2f} "
            f"| {c.memory_bits / 1e3:,.0f} | {c.generation} |"
        )
    return "\n".join(lines) + "\n"
