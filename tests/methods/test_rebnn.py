"""ReBNN: the learned scale, the balance γ, and the gradient of the weighted reconstruction loss."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import unflip
from unflip import methods
from unflip.layers import BinaryConv2d, BinaryLinear
from unflip.methods.reactnet import RPReLU, RSign
from unflip.methods.rebnn import ResilientSign

SHAPES = [(5, 40), (4, 3, 3, 3), (6, 1, 1, 1)]


def signs_of(weight: Tensor) -> Tensor:
    return torch.where(weight.detach() >= 0, 1.0, -1.0).to(weight.dtype)


def made(shape: tuple[int, ...]) -> tuple[Tensor, ResilientSign]:
    weight = (0.7 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    part = ResilientSign(weight)
    with torch.no_grad():
        part.alpha.copy_(torch.randn_like(part.alpha))
    return weight, part


def test_the_scale_starts_at_the_mean() -> None:
    weight = torch.tensor([[1.0, -3.0], [0.5, 0.0]])
    part = ResilientSign(weight)
    assert part.alpha.tolist() == [[2.0], [0.25]]
    assert part(weight).tolist() == [[2, -2], [0.25, 0.25]]
    with torch.no_grad():
        part.alpha.neg_()
    assert part(weight).tolist() == [[2, -2], [0.25, 0.25]], "its absolute value"


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_the_task(shape: tuple[int, ...]) -> None:
    weight, part = made(shape)
    upstream = torch.randn(shape, dtype=torch.float64)
    found = torch.autograd.grad(part(weight), [weight, part.alpha], upstream)
    alpha = part.alpha.detach()
    inside = weight.detach().abs() <= 1
    torch.testing.assert_close(found[0], alpha.abs() * upstream * inside)
    by_scale = (upstream * signs_of(weight)).flatten(1).sum(1)
    torch.testing.assert_close(found[1].flatten(), by_scale * alpha.sign().flatten())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pull_is_the_gradient_of_the_reconstruction_loss(shape: tuple[int, ...]) -> None:
    weight, part = made(shape)
    part.gamma.uniform_(0, 2)
    task = torch.randn(shape, dtype=torch.float64), torch.randn_like(part.alpha)
    weight.grad, part.alpha.grad = task[0].clone(), task[1].clone()
    part.before_step(weight)
    residual = weight - part.alpha.abs() * signs_of(weight)
    loss = (0.5 * part.gamma * residual**2).sum()
    pull = torch.autograd.grad(loss, [weight, part.alpha])
    torch.testing.assert_close(weight.grad, task[0] + pull[0])
    torch.testing.assert_close(part.alpha.grad, task[1] + pull[1])


def test_the_balance() -> None:
    """γ of the next step: the share of changed signs times the largest |∂L/∂Q|."""
    weight = torch.tensor([[0.5, -0.5, 0.25, 0.5], [0.5, 0.5, 0.5, 0.5]], requires_grad=True)
    part = ResilientSign(weight)
    with torch.no_grad():
        part.alpha.copy_(torch.tensor([[0.5], [2.0]]))
    upstream = torch.tensor([[1.0, -8.0, 2.0, 0.0], [3.0, -1.0, 0.0, 0.0]])
    part(weight).backward(upstream)
    part.before_step(weight)
    assert part.gamma.tolist() == [[0], [0]], "no pull in the first step"
    weight.data.copy_(torch.tensor([[-0.5, 0.5, 0.25, 0.5], [0.5, 0.5, 0.5, -0.5]]))
    part.after_step(weight)
    assert part.gamma.tolist() == [[2 / 4 * 8], [1 / 4 * 3]]
    part.before_step(weight)
    part.after_step(weight)
    assert part.gamma.tolist() == [[0], [0]], "no sign has changed"


def test_the_largest_gradient_excludes_the_pull() -> None:
    weight = torch.tensor([[0.5, -0.25]], requires_grad=True)
    part = ResilientSign(weight)
    part.gamma.fill_(100)
    part(weight).backward(torch.tensor([[1.0, -4.0]]))
    part.before_step(weight)
    weight.data.neg_()
    part.after_step(weight)
    assert part.gamma.tolist() == [[4.0]]


def test_a_filter_of_zeros_has_no_pull() -> None:
    layer = BinaryLinear(4, 2, method="rebnn")
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight_binarizer.alpha[0] = 0  # type: ignore[index]
    for _ in range(2):
        layer(torch.randn(3, 4)).sum().backward()
        unflip.before_step(layer)
        unflip.after_step(layer)
        assert layer.weight_binarizer.gamma.isfinite().all()  # type: ignore[operator, union-attr]
        assert layer.weight.grad is not None
        assert layer.weight.grad.isfinite().all()


def test_a_loop_without_before_step_is_warned() -> None:
    layer = BinaryLinear(4, 3, method="rebnn")
    with pytest.warns(UserWarning, match=r"rebnn: .* without unflip.before_step") as found:
        unflip.after_step(layer)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unflip.before_step(layer)  # no gradient yet
        unflip.after_step(layer)


def test_inputs_and_activations_are_reactnets() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.PReLU(), nn.Conv2d(4, 2, 3))
    binary = unflip.binarize(model, "rebnn", quiet=True)
    assert isinstance(binary.get_submodule("1.input_binarizer"), RSign)
    assert isinstance(binary.get_submodule("2"), RPReLU)


def test_it_starts_from_reactnets_first_step_and_from_itself() -> None:
    def net(method: str, **options: str) -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.PReLU(), nn.Linear(4, 2))
        return unflip.binarize(layers, method, quiet=True, **options)

    first, second, third = net("reactnet", weights="float"), net("rebnn"), net("rebnn")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.uniform_(-1, 1)
    unflip.load_twin(second, first.state_dict())
    state = second.state_dict()
    assert all(torch.equal(state[k], v) for k, v in first.state_dict().items())
    unflip.load_twin(third, state)
    assert all(torch.equal(third.state_dict()[k], v) for k, v in state.items())


def test_the_scale_starts_at_the_mean_of_weights_that_load_twin_brings() -> None:
    first = nn.Sequential(BinaryLinear(8, 5, method={"name": "reactnet", "weights": "float"}))
    second = nn.Sequential(BinaryLinear(8, 5, method="rebnn"))
    third = nn.Sequential(BinaryLinear(8, 5, method="rebnn"))
    unflip.load_twin(second, first.state_dict())
    alpha = second[0].weight_binarizer.alpha
    torch.testing.assert_close(alpha.detach(), second[0].weight.abs().mean(1, keepdim=True))
    with torch.no_grad():
        alpha.fill_(7)
    unflip.load_twin(third, second.state_dict())
    assert (third[0].weight_binarizer.alpha == 7).all(), "a trained scale is taken over"


def test_state_survives_copies_and_saving() -> None:
    layer, other = (BinaryConv2d(2, 3, 3, method="rebnn") for _ in range(2))
    layer.weight_binarizer.gamma.uniform_()  # type: ignore[operator, union-attr]
    twin = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    for found in (twin, other):
        for name, value in layer.state_dict().items():
            assert torch.equal(found.state_dict()[name], value)
    assert {"weight_binarizer.alpha", "weight_binarizer.gamma"} <= set(layer.state_dict())


def test_eval_is_frozen() -> None:
    model = nn.Sequential(BinaryConv2d(3, 8, 3, method="rebnn"), nn.BatchNorm2d(8))
    with torch.no_grad():
        model[0].weight_binarizer.alpha.uniform_(-1, 1)  # type: ignore[union-attr,operator]
    x = torch.randn(4, 3, 6, 6)
    model(x)
    assert torch.equal(unflip.freeze(model)(x), model.eval()(x))


def test_lns_cannot_wrap_it() -> None:
    with pytest.raises(ValueError, match=r"rebnn.*gradients of latent weights"):
        methods.get("lns", base="rebnn")
