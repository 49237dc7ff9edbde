"""Backbones from published image models, without any download."""

from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models.swin_transformer import SwinTransformer

from bev_lightning.checkpointing.pretrained import load_backbone
from bev_lightning.errors import InputError
from bev_lightning.models.image import ResNet
from bev_lightning.models.swin import Swin

SIZES = {"depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8]}


def make_swins() -> tuple[Swin, SwinTransformer]:
    torch.manual_seed(0)
    theirs = SwinTransformer([4, 4], 16, window_size=[4, 4], **SIZES)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return Swin(16, window=4, **SIZES, out_stages=(0, 1, 2, 3)), theirs


def same_maps(ours: Swin, theirs: SwinTransformer) -> None:
    images = torch.randn(1, 3, 160, 192)
    ours.eval(), theirs.eval()
    maps: list[Tensor] = []
    with torch.no_grad():
        x = theirs.features[0](images)
        for stage in range(4):
            x = theirs.features[2 * stage + 1](x)
            maps.append(ours.norms[stage](x).permute(0, 3, 1, 2))
            if stage < 3:
                x = theirs.features[2 * stage + 2](x)
        for got, wanted in zip(ours(images), maps, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


def timm_names(state: dict[str, Tensor], first: int) -> dict[str, Tensor]:
    """torchvision's state dict under the names of timm (first = 1) or of the original (0)."""
    renamed = {}
    for name, value in state.items():
        parts = name.split(".")
        if name.startswith("features.0."):
            new = f"patch_embed.{'proj' if parts[2] == '0' else 'norm'}.{parts[3]}"
        elif parts[0] == "features" and int(parts[1]) % 2:
            new = f"layers.{int(parts[1]) // 2}.blocks.{'.'.join(parts[2:])}"
            new = new.replace("mlp.0.", "mlp.fc1.").replace("mlp.3.", "mlp.fc2.")
        elif parts[0] == "features":
            new = f"layers.{int(parts[1]) // 2 - 1 + first}.downsample.{'.'.join(parts[2:])}"
        else:
            new = name
        renamed[new] = value
    return renamed


@pytest.mark.parametrize("names", ["torchvision", "timm", "original"])
def test_swin_from_other_names_gives_the_same_maps(names: str, tmp_path: Path) -> None:
    ours, theirs = make_swins()
    state = dict(theirs.state_dict())
    if names != "torchvision":
        state = timm_names(state, 1 if names == "timm" else 0)
    if names == "original":
        torch.save({"model": state}, tmp_path / "swin.pth")
        fresh = load_backbone(ours, str(tmp_path / "swin.pth"))
    else:
        save_file(state, tmp_path / "swin.safetensors")
        fresh = load_backbone(ours, str(tmp_path / "swin.safetensors"))
    assert fresh == [f"norms.{k}.{kind}" for k in range(4) for kind in ("weight", "bias")]
    same_maps(ours, theirs)


def test_resnet_from_torchvision_gives_the_same_maps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(weights=None).eval()
    state = {f"img_backbone.{name}": value for name, value in theirs.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "resnet.pth")
    ours = ResNet(18, out_stages=(0,)).eval()
    assert load_backbone(ours, str(tmp_path / "resnet.pth")) == []
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(images))))
        torch.testing.assert_close(ours(images)[0], theirs.layer1(x))


def test_deformable_offsets_stay_fresh(tmp_path: Path) -> None:
    plain = ResNet(50, 8, out_stages=(1,))
    torch.save(plain.state_dict(), tmp_path / "r50.pth")
    ours = ResNet(50, 8, out_stages=(1,), deformable_stages=(1,))
    fresh = load_backbone(ours, str(tmp_path / "r50.pth"))
    assert len(fresh) == 8 and all("conv2.conv_offset" in name for name in fresh)
    assert ours.layer2[0].conv2.weight.equal(plain.layer2[0].conv2.weight)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    torch.save(ResNet(18, 8).state_dict(), tmp_path / "thin.pth")
    with pytest.raises(
        InputError, match="another backbone: 0 of .* are missing and .* of another shape"
    ):
        load_backbone(ResNet(18, 16), str(tmp_path / "thin.pth"))
    with pytest.raises(InputError, match="neither a file nor one of torchvision's weights"):
        load_backbone(ResNet(18, 8), "ResNet19_Weights.IMAGENET1K_V1")
    with pytest.raises(InputError, match="Linear takes no pretrained weights"):
        load_backbone(torch.nn.Linear(1, 1), str(tmp_path / "thin.pth"))
    for name in ("cut.safetensors", "cut.pth"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(InputError, match=f"{name} is no readable checkpoint"):
            load_backbone(ResNet(18, 8), str(tmp_path / name))
