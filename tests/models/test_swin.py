import pytest
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer

from bev_lightning.errors import InputError
from bev_lightning.models.swin import PatchMerging, Swin, WindowAttention


def make_small() -> Swin:
    return Swin(8, (2, 2, 1), (1, 2, 4), window=3, out_stages=(1, 2), drop_path=0.0)


def test_shapes_of_sizes_that_do_not_divide() -> None:
    swin = make_small()
    maps = swin(torch.randn(2, 3, 38, 53))
    assert [tuple(x.shape) for x in maps] == [(2, 16, 5, 7), (2, 32, 3, 4)]
    assert swin.out_channels == (16, 32)
    sum(x.square().mean() for x in maps).backward()
    for name, parameter in swin.named_parameters():
        assert parameter.grad is not None, name


def test_published_size() -> None:
    with torch.device("meta"):
        swin = Swin()
    # torchvision's swin_t has 28,288,354 with its classifier (769,000) and one norm; we have three.
    ours = sum(p.numel() for p in swin.parameters())
    assert ours == 28_288_354 - 769_000 - 2 * 768 + 2 * (192 + 384 + 768)


def test_same_as_torchvision_where_every_map_is_larger_than_a_window() -> None:
    torch.manual_seed(0)
    theirs = SwinTransformer([4, 4], 8, [2, 2], [1, 2], [3, 3], stochastic_depth_prob=0.0).eval()
    ours = Swin(8, (2, 2), (1, 2), window=3, out_stages=(1,), drop_path=0.0).eval()
    state = theirs.features.state_dict()
    renamed = {}
    for name, value in state.items():
        stage, _, rest = name.partition(".")
        if name.endswith("relative_position_index"):
            continue
        if stage == "0":
            part = "patch_embed" if rest.startswith("0.") else "patch_norm"
            renamed[f"{part}.{rest[2:]}"] = value
        elif stage == "2":
            # Theirs: column, row, channel; ours: channel, row, column.
            value = value.unflatten(-1, (2, 2, 8)).transpose(-1, -3).flatten(-3)
            renamed[f"downsamples.0.{rest}"] = value
        else:
            rest = rest.replace(".attn.", ".attention.").replace(".mlp.3.", ".mlp.2.")
            value = value.view(25, -1) if name.endswith("bias_table") else value
            renamed[f"stages.{int(stage) // 2}.{rest}"] = value
    renamed["norms.0.weight"], renamed["norms.0.bias"] = theirs.norm.weight, theirs.norm.bias
    ours.load_state_dict(renamed, strict=True)
    images = torch.randn(2, 3, 64, 40)  # 16 x 10 and 8 x 5 tokens: padded to windows of 3
    with torch.no_grad():
        wanted = theirs.norm(theirs.features(images)).permute(0, 3, 1, 2)
        torch.testing.assert_close(ours(images)[0], wanted)


def test_a_shifted_window_does_not_look_across_the_border() -> None:
    torch.manual_seed(0)
    attention = WindowAttention(4, 1, window=4, shift=2)
    x = torch.randn(1, 8, 8, 4, requires_grad=True)
    attention(x)[0, 0, 0].sum().backward()
    assert x.grad is not None
    seen = x.grad[0].abs().sum(-1) > 1e-12
    # The corner shares its shifted window with the far edges; only its own 2 x 2 tokens are near.
    assert seen[:2, :2].all() and seen.sum() == 4


def test_patch_merging_order() -> None:
    merging = PatchMerging(3)
    captured = []
    merging.norm.register_forward_hook(lambda module, args, out: captured.append(args[0]))
    x = torch.arange(2 * 2 * 3, dtype=torch.float32).view(1, 2, 2, 3)
    merging(x)
    assert captured[0].flatten().tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_gradient_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = make_small()
    frugal = Swin(
        8, (2, 2, 1), (1, 2, 4), 3, out_stages=(1, 2), drop_path=0.0, gradient_checkpointing=True
    )
    frugal.load_state_dict(plain.state_dict())
    images = torch.randn(1, 3, 24, 24)
    for backbone in (plain, frugal):
        sum(x.square().mean() for x in backbone(images)).backward()
    for (name, a), b in zip(plain.named_parameters(), frugal.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b[1].grad, msg=name)


def test_refuses_unequal_lists() -> None:
    with pytest.raises(InputError, match="2 depths but 3 num_heads"):
        Swin(8, (2, 2), (1, 2, 4))


def test_drop_path_is_off_in_evaluation() -> None:
    torch.manual_seed(0)
    swin = Swin(8, (2, 2), (1, 2), 3, out_stages=(1,), drop_path=0.5)
    images = torch.randn(2, 3, 24, 24)
    swin.train()
    assert not torch.equal(swin(images)[0], swin(images)[0])
    swin.eval()
    assert torch.equal(swin(images)[0], swin(images)[0])
    assert isinstance(swin.patch_norm, nn.LayerNorm)
