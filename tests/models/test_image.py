import pytest
import torch
import torchvision
from torch import Tensor, nn

from bev_lightning.errors import InputError
from bev_lightning.models.image import FPN, DeformableConv2d, LiftFPN, ResNet


def shapes(maps: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in maps]


def randomise_statistics(module: nn.Module) -> None:
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)


def test_thin_resnet_for_the_toy() -> None:
    backbone = ResNet(18, width=16, out_stages=(1, 2))
    maps = backbone(torch.randn(2, 3, 48, 80))
    assert shapes(maps) == [(2, 32, 6, 10), (2, 64, 3, 5)]
    assert backbone.out_channels == (32, 64)
    assert not any(name.startswith("layer4") for name, _ in backbone.named_parameters())


@pytest.mark.parametrize("depth", [18, 50])
def test_same_as_torchvision(depth: int) -> None:
    torch.manual_seed(depth)
    theirs = torchvision.models.get_model(f"resnet{depth}").eval()
    randomise_statistics(theirs)
    ours = ResNet(depth, out_stages=(0, 3)).eval()
    state = {k: v for k, v in theirs.state_dict().items() if not k.startswith("fc.")}
    ours.load_state_dict(state, strict=True)
    images = torch.randn(1, 3, 40, 72)
    with torch.no_grad():
        x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(images))))
        first = theirs.layer1(x)
        last = theirs.layer4(theirs.layer3(theirs.layer2(first)))
        maps = ours(images)
    torch.testing.assert_close(maps[0], first)
    torch.testing.assert_close(maps[1], last)


def test_published_sizes() -> None:
    with torch.device("meta"):
        plain = ResNet(101, out_stages=(1, 2, 3), caffe_style=True)
        deformable = ResNet(101, caffe_style=True, deformable_stages=(2, 3))
    count = sum(p.numel() for p in plain.parameters())
    assert count == 42_500_160  # torchvision's resnet101 without its classifier
    offsets = sum(27 * (planes * 9 + 1) * blocks for planes, blocks in ((256, 23), (512, 3)))
    assert sum(p.numel() for p in deformable.parameters()) == count + offsets
    assert plain.out_channels == (512, 1024, 2048)


def test_caffe_style_strides_on_the_first_convolution() -> None:
    block = ResNet(50, width=8, caffe_style=True).get_submodule("layer2.0")
    assert (block.conv1.stride, block.conv2.stride) == ((2, 2), (1, 1))
    block = ResNet(50, width=8).get_submodule("layer2.0")
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))


def test_deformable_convolution_starts_as_half_a_plain_one() -> None:
    torch.manual_seed(0)
    conv = DeformableConv2d(4, 6, stride=2)
    x = torch.randn(2, 4, 9, 7)
    wanted = 0.5 * nn.functional.conv2d(x, conv.weight, stride=2, padding=1)
    torch.testing.assert_close(conv(x), wanted)
    # In a backbone too: its initialisation must not touch the offsets.
    backbone = ResNet(50, width=4, out_stages=(2,), deformable_stages=(2,))
    offsets = backbone.get_submodule("layer3.1.conv2.conv_offset")
    assert not offsets.weight.any()


def test_deformable_convolution_with_offsets_of_one_pixel() -> None:
    torch.manual_seed(0)
    conv = DeformableConv2d(3, 5)
    with torch.no_grad():
        conv.conv_offset.bias[:18] = torch.tensor([1.0, -2.0]).repeat(9)  # dy, dx of each tap
        conv.conv_offset.bias[18:] = 100.0  # masks of 1
    x = torch.randn(1, 3, 10, 12)
    plain = nn.functional.conv2d(x, conv.weight, padding=1)
    out = conv(x)
    torch.testing.assert_close(out[..., 2:-4, 4:-4], plain[..., 3:-3, 2:-6])


def test_deformable_convolution_under_autocast() -> None:
    conv = DeformableConv2d(3, 5)
    x = torch.randn(1, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, conv(x.bfloat16().float()).bfloat16())


def test_frozen_stages_and_norms() -> None:
    backbone = ResNet(18, width=4, out_stages=(1,), frozen_stages=1).train()
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith("layer2.") for name in trained)
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    backbone(torch.randn(2, 3, 32, 32))
    after = backbone.state_dict()
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed and all(k.startswith("layer2.") for k in changed)
    assert ResNet(18, width=4, frozen_stages=0).conv1.weight.requires_grad is False

    backbone = ResNet(18, width=4, out_stages=(1,), norm_eval=True, norm_frozen=True).train()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    backbone(torch.randn(2, 3, 32, 32))
    assert all(torch.equal(before[k], v) for k, v in backbone.state_dict().items())
    assert not backbone.bn1.weight.requires_grad and backbone.conv1.weight.requires_grad


def test_gradient_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = ResNet(18, width=4, out_stages=(1, 2))
    frugal = ResNet(18, width=4, out_stages=(1, 2), gradient_checkpointing=True)
    randomise_statistics(plain)
    frugal.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 32, 48)
    for backbone in (plain, frugal):
        sum(x.square().mean() for x in backbone(images)).backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    state = frugal.state_dict()
    for name, value in plain.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(state[name], value, msg=name)


def test_refusals() -> None:
    with pytest.raises(InputError, match="ResNet depth 19 is unknown"):
        ResNet(19)
    with pytest.raises(InputError, match="ResNet-18 has no bottlenecks"):
        ResNet(18, deformable_stages=(3,))
    with pytest.raises(InputError, match="num_outs 1 is below its 2 inputs"):
        FPN((4, 8), 4, num_outs=1)
    with pytest.raises(InputError, match="at least two maps"):
        LiftFPN((4,), 4)


def test_fpn_with_extra_maps_and_odd_sizes() -> None:
    torch.manual_seed(0)
    neck = FPN((4, 8), 6, num_outs=4)
    maps = [torch.randn(2, 4, 9, 13), torch.randn(2, 8, 5, 7)]
    outs = neck(maps)
    assert shapes(outs) == [(2, 6, 9, 13), (2, 6, 5, 7), (2, 6, 3, 4), (2, 6, 2, 2)]
    assert neck.out_channels == (6, 6, 6, 6)
    torch.testing.assert_close(outs[2], neck.fpn_convs[2](outs[1]))
    torch.testing.assert_close(outs[3], neck.fpn_convs[3](outs[2].relu()))


def test_lift_fpn_returns_one_map_fewer() -> None:
    neck = LiftFPN((4, 8, 16), 6).eval()
    maps = [torch.randn(2, 4, 9, 13), torch.randn(2, 8, 5, 7), torch.randn(2, 16, 3, 4)]
    given = [x.clone() for x in maps]
    assert shapes(neck(maps)) == [(2, 6, 9, 13), (2, 6, 5, 7)]
    assert all(torch.equal(a, b) for a, b in zip(maps, given, strict=True))
