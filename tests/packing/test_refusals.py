"""Operations that cannot be packed are refused with their name, place and the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unflip
from unflip.packing import CannotPack, make_packed, pack, read

IMAGE = torch.randn(2, 4, 6, 6)


class Act(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def deep(function):
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ModuleDict({"act": Act(function)})["act"])
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), block))


REFUSED = {
    "sin": (
        torch.sin,
        r"aten\.sin at 1\.1\.1 \(test_refusals\.py line \d+: .*\): this operation is not supported",
    ),
    "norm of rows": (lambda x: F.layer_norm(x, [6]), r"over the last dims \[6\] .*all dims but"),
    "learned pixels": (
        lambda x: F.layer_norm(x, [4, 6, 6], torch.arange(144.0).view(4, 6, 6)),
        r"differs from pixel to pixel",
    ),
    "log-softmax of rows": (lambda x: x.log_softmax(2), r"dim=2 is not supported; .*the channels"),
    "half as many again": (
        lambda x: F.interpolate(x, size=(9, 6)),
        r"upsampling \(6, 6\) to \(9, 6\) pixels .*a multiple of the input size",
    ),
    "a part of a nearest pixel": (
        lambda x: F.interpolate(x, scale_factor=2.1),
        r"scale_factor=2\.1 makes 12 of 6 pixels instead of 12\.6; .*size=",
    ),
    "a part of a pixel": (
        lambda x: F.interpolate(x, scale_factor=(2, 0.6), mode="bilinear"),
        r"scale_factor=0\.6 makes 3 of 6 pixels instead of 3\.6; .*size=",
    ),
    "smoother": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        r"upsample_bicubic2d .*mode='bilinear' or 'nearest'",
    ),
    "without moiré": (
        lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True),
        r"upsample_bilinear2d_aa .*without antialias",
    ),
    "a line": (
        lambda x: F.interpolate(x.mean((2, 3)).unsqueeze(-1), scale_factor=2, mode="linear"),
        r"upsample_linear1d .*only images can be resized",
    ),
    "reflect": (
        lambda x: F.pad(x, (1, 1, 0, 0), mode="reflect"),
        r"aten\.pad .*mode='reflect' is not supported; .*zeros only",
    ),
    "ones": (lambda x: F.pad(x, (1, 1), value=1), r"value=1.*zeros only"),
    "batch in pixels": (lambda x: x.reshape(-1, 4), r"mixes the images of the batch"),
    "mean of all": (lambda x: x - x.mean(), r"aten\.mean .*over the pixels"),
    "rows": (
        lambda x: x.mean(3, keepdim=True),
        r"mean over dims \[3\] is not supported; only a mean over the pixels, dims \(2, 3\), can be packed",
    ),
    "transposed": (lambda x: x.transpose(2, 3), r"aten\.transpose .*not supported"),
    "unflattened": (
        lambda x: x.view(len(x), 2, 2, 36),
        r"only flattening an image to a vector can be packed",
    ),
    "shuffled by hand": (
        lambda x: x.view(len(x), 2, 2, 6, 6).transpose(1, 2).flatten(1, 2),
        r"nn\.ChannelShuffle",
    ),
    "three dimensions": (lambda x: x.flatten(2), r"aten\.flatten"),
    "product of two": (lambda x: x.flatten(1) @ x.flatten(1).T, r"aten\."),
    "a picture": (lambda x: x + torch.rand(6, 6), r"aten\.rand .*random"),
    "pixelwise": (lambda x: x * torch.arange(36.0).view(6, 6), r"differs from pixel to pixel"),
    "broadcast": (lambda x: x[:, :1] * torch.ones(4, 1, 1), r"broadcast"),
    "broadcast sum": (
        lambda x: x + x.mean((2, 3), keepdim=True),
        r"it adds .* both must have the same shape",
    ),
    "division": (lambda x: 1 / (x * x + 1), r"aten\.(reciprocal|div)"),
    "division by zero": (lambda x: x / torch.tensor([0.0]), r"it divides by zero"),
    "dropout": (lambda x: F.dropout(x, 0.5), r"drops values at random even in evaluation mode"),
    "dilated pool": (
        lambda x: F.max_pool2d(x, 2, dilation=2),
        r"dilation=\[2, 2\] is not supported",
    ),
    "uneven windows": (lambda x: F.adaptive_avg_pool2d(x, 4), r"windows of different sizes"),
    "batch statistics": (
        lambda x: F.batch_norm(x, None, None, training=True),
        r"only running statistics",
    ),
    "softmax of rows": (lambda x: x.softmax(3), r"dim=3 is not supported; .*the channels"),
    "cat of rows": (lambda x: torch.cat([x, x], 2), r"dim=2 is not supported; .*channels"),
    "half": (lambda x: x.half() * 2, r"float16; values must be float32"),
    "own weights": (lambda x: F.conv2d(x, x[:, :, :1, :1]), r"its weight depends on the input"),
    "double": (lambda x: x.double(), r"float64; values must be float32"),
    "shared memory": (
        lambda x: _in_place_on_a_view(x),
        r"changes a tensor in place while another view",
    ),
    "choice": (lambda x: x if x.sum() > 0 else -x, r"torch\.export cannot trace"),
    "everything infinite": (
        lambda x: x.clamp(min=float("inf")),
        r"its bound is inf; it must be a finite number",
    ),
    "no bound": (
        lambda x: x.clamp(max=float("nan")),
        r"its bound is nan; it must be a finite number",
    ),
    "infinity": (lambda x: x * float("inf"), r"NaN or infinity"),
    "a gate of one pixel, expanded": (
        lambda x: x * x.mean((2, 3), keepdim=True).expand_as(x),
        r"aten\.expand_as .*broadcasts \(2, 4, 1, 1\) to \(2, 4, 6, 6\); .*leave expand out",
    ),
    "several powers": (
        lambda x: x ** torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        r"aten\.pow at 1\.1\.1 .* cannot be packed with these arguments \(RuntimeError: .*ambiguous",
    ),
    "a tensor to write to": (
        lambda x: torch.add(x, x, out=torch.empty(0)),
        r"aten\.add at .* cannot be packed with these arguments \(TypeError: .*'out'",
    ),
    "places of maxima": (
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)[1].float(),
        r"aten\.to at .* cannot be packed with these arguments",
    ),
    "an operation of the same name": (
        lambda x: torch.ops.unflip_tests.relu(x),
        r"unflip_tests::relu at 1\.1\.1 \(.*\): this operation is not supported",
    ),
}


@torch.library.custom_op("unflip_tests::relu", mutates_args=())
def _relu(x: torch.Tensor) -> torch.Tensor:
    """As torch's on the example, but not for large negative values."""
    return torch.where(x > -100, x.relu(), x)


@_relu.register_fake
def _relu_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _in_place_on_a_view(x):
    y = x * 2
    y[:, :2].relu_()
    return y


@pytest.mark.parametrize("name", REFUSED)
def test_operations(name):
    function, reason = REFUSED[name]
    with pytest.raises(CannotPack, match=reason):
        make_packed(deep(function), IMAGE)


@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_padding_modes_by_the_layers_name(mode):
    def model():
        return nn.Sequential(
            nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode), nn.Conv2d(4, 2, 1)
        )

    with pytest.raises(
        CannotPack, match=f"layer '1' has padding_mode='{mode}'; the runtime pads with zeros only"
    ):
        make_packed(unflip.binarize(model(), "xnor", quiet=True), IMAGE)
    with pytest.raises(CannotPack, match=rf"aten\.pad at 1: mode='{mode}'"):
        make_packed(model(), IMAGE)


def test_inputs_and_outputs():
    with pytest.raises(CannotPack, match="nothing to pack"):
        make_packed(nn.Identity(), IMAGE)
    with pytest.raises(CannotPack, match="nothing to pack"):
        make_packed(Act(lambda x: x.clone() * 1), IMAGE)
    with pytest.raises(CannotPack, match="does not depend on its input"):
        make_packed(Act(lambda x: torch.zeros(2, 3)), IMAGE)
    with pytest.raises(CannotPack, match=r"example_input must be a batch .*not \(4, 6, 6\)"):
        make_packed(deep(F.relu), IMAGE[0])
    with pytest.raises(CannotPack, match="not str"):
        make_packed(deep(F.relu), "image")  # type: ignore[arg-type]
    with pytest.raises(CannotPack, match=r"cannot run on example_input of shape \(2, 3, 6, 6\)"):
        make_packed(deep(F.relu), IMAGE[:, :3])
    with pytest.raises(CannotPack, match=r"cannot run on example_input .*: KeyError: 'features'"):
        make_packed(Act(lambda x: {}["features"]), IMAGE)
    with pytest.raises(CannotPack, match="example_input contains NaN"):
        make_packed(deep(F.relu), IMAGE / 0 * 0)
    for other in (IMAGE.to_sparse(), IMAGE.to(torch.complex64)):
        with pytest.raises(CannotPack, match="example_input must be dense and of real numbers"):
            make_packed(deep(F.relu), other)


def test_several_inputs():
    class Mixed(nn.Module):
        def forward(self, x, y):
            return x + y

    with pytest.raises(CannotPack, match=r"cannot run on example_input .*argument: 'y'"):
        make_packed(Mixed(), IMAGE)


def test_labels_and_preprocessing(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(CannotPack, match="2 labels for a network with 3 outputs"):
        pack(model, IMAGE, tmp_path / "x", labels=["a", "b"])
    with pytest.raises(CannotPack, match="with exactly 'mean' and 'std'"):
        pack(model, IMAGE, tmp_path / "x", preprocess={"mean": [0.0] * 4})
    with pytest.raises(CannotPack, match=r"std=\[1.0\] must be 4 finite numbers"):
        pack(model, IMAGE, tmp_path / "x", preprocess={"mean": [0.0] * 4, "std": [1.0]})
    with pytest.raises(CannotPack, match=r"mean=0.5 must be 4 finite numbers, one per channel"):
        pack(model, IMAGE, tmp_path / "x", preprocess={"mean": 0.5, "std": 0.2})
    with pytest.raises(
        CannotPack, match=r"preprocess=0.5 must be a dict with exactly 'mean' and 'std'"
    ):
        pack(model, IMAGE, tmp_path / "x", preprocess=0.5)
    with pytest.raises(CannotPack, match="must be positive"):
        pack(model, IMAGE, tmp_path / "x", preprocess={"mean": [0.0] * 4, "std": [1.0, 1, 1, 0]})
    assert not list(tmp_path.iterdir())


def test_labels_of_pixels_are_one_a_channel(tmp_path):
    model = nn.Conv2d(4, 5, 1)
    with pytest.raises(CannotPack, match="180 labels for a network with 5 output channels"):
        make_packed(model, IMAGE, labels=["a"] * 180)
    pack(model, IMAGE, tmp_path / "x", labels=list("abcde"))
    assert read(tmp_path / "x").graph["labels"] == list("abcde")


def test_other_precisions():
    model = unflip.binarize(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)),
        "bireal",
        quiet=True,
    )
    with pytest.raises(CannotPack, match=r"0\.weight is torch\.float64; call \.float\(\)"):
        make_packed(model.double(), IMAGE)


def test_nan_weights():
    model = deep(F.relu)
    with torch.no_grad():
        model[0].weight[0] = float("nan")
    with pytest.raises(CannotPack, match="weight of '0' contains NaN or infinity"):
        make_packed(model, IMAGE)


def test_hooks_that_change_values_are_noticed():
    model = unflip.freeze(
        unflip.binarize(deep(F.relu), "bireal", skip=["0"], quiet=True, keep_first_and_last=False)
    )
    make_packed(model, IMAGE)
    model.get_submodule("1.1.0").register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(CannotPack, match=r"layer '1\.1\.0' has a forward hook, .*remove the hook"):
        make_packed(model, IMAGE)


def test_a_hook_that_changes_no_value_of_the_example():
    """It would be left out, and other images need it."""
    model = unflip.binarize(deep(F.relu), "bireal", quiet=True, keep_first_and_last=False)
    model[0].register_forward_hook(lambda module, inputs, output: output.clamp(-1e6, 1e6))
    with pytest.raises(CannotPack, match="layer '0' has a forward hook"):
        make_packed(model, IMAGE)


def test_the_example_is_not_changed():
    class Changes(nn.Module):
        def forward(self, x):
            return F.relu_(x) * 2

    image = IMAGE.clone()
    make_packed(Changes(), image)
    assert torch.equal(image, IMAGE)


def test_contexts_and_scripts():
    class Half(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return x.relu()

    with pytest.raises(CannotPack, match=r"in a context such as torch\.autocast"):
        make_packed(Half(), IMAGE)
    with pytest.raises(CannotPack, match="a ScriptModule cannot be packed"):
        make_packed(torch.jit.script(nn.ReLU()), IMAGE)


def test_modules_that_torch_cannot_copy():
    model = deep(F.relu)
    model[0].feature = model[0].weight * 2
    with pytest.raises(ValueError, match=r"feature of '0' \(Conv2d\) is a tensor with a gradient"):
        make_packed(model, IMAGE)
    wrapped = deep(F.relu)
    wrapped[1].forward = lambda x: wrapped[1][0](x)
    with pytest.raises(ValueError, match=r"the forward of '1' \(Sequential\) .*run the original"):
        make_packed(wrapped, IMAGE)


def test_what_readers_would_refuse_is_not_written():
    with pytest.raises(CannotPack, match=r"is 1049600 × 1 × 1; .* at most 1,048,576 channels"):
        make_packed(nn.Flatten(), torch.randn(1, 41, 160, 160))
    with pytest.raises(
        CannotPack, match=r"is 1 × 65537 × 1; .* heights and widths of at most 65,536"
    ):
        make_packed(nn.ZeroPad2d((0, 0, 0, 1)), torch.randn(1, 1, 65_536, 1))


def test_more_features_than_pixels_along_a_side(tmp_path):
    """The format allows 1,048,576 channels, for flattened images and for vectors."""
    model, example = nn.Sequential(nn.Flatten(), nn.Linear(65_600, 2)), torch.randn(1, 41, 40, 40)
    pack(model, example, tmp_path / "x")
    found = unflip.load(tmp_path / "x")(example)
    assert torch.allclose(found, model(example), atol=1e-4)
    pack(model[1], example.flatten(1), tmp_path / "y")
    assert unflip.load(tmp_path / "y").input_shape == (65_600, 1, 1)


def test_labels_are_not_one_string():
    with pytest.raises(CannotPack, match="labels='abcde' must be a list of strings"):
        make_packed(nn.Conv2d(4, 5, 1), IMAGE, labels="abcde")


def test_a_label_has_no_nul():
    with pytest.raises(CannotPack, match=r"label 'e\\x00' contains a NUL"):
        make_packed(nn.Conv2d(4, 5, 1), IMAGE, labels=[*"abcd", "e\0"])
