"""Fuser, BEV backbone and neck."""

import pytest
import torch

from bev_lightning.models.bev import SECOND, SECONDFPN, ConvFuser


def test_toy_sizes_end_at_stride_two():
    backbone = SECOND(8, (6, 8, 10), (1, 1, 1), (2, 2, 2))
    neck = SECONDFPN((6, 8, 10), (4, 4, 4), (1, 2, 4))
    maps = backbone(torch.zeros(2, 8, 16, 24))
    assert [tuple(m.shape) for m in maps] == [(2, 6, 8, 12), (2, 8, 4, 6), (2, 10, 2, 3)]
    assert neck(maps).shape == (2, 12, 8, 12)
    assert neck.out_channels == 12


def test_published_names_and_norms():
    with torch.device("meta"):
        backbone, neck, fuser = SECOND(256), SECONDFPN(), ConvFuser((80, 256), 256)
    assert backbone.blocks[1][15].weight.shape == (256, 256, 3, 3)
    assert backbone.blocks[1][0].stride == (2, 2)
    assert (backbone.blocks[0][1].eps, backbone.blocks[0][1].momentum) == (1e-3, 0.01)
    assert neck.deblocks[0][0].weight.shape == (256, 128, 1, 1)
    assert neck.deblocks[1][0].weight.shape == (256, 256, 2, 2)
    assert (neck.deblocks[1][1].eps, neck.out_channels) == (1e-3, 512)
    assert fuser[0].weight.shape == (256, 336, 3, 3)
    assert fuser[1].eps == 1e-5


def test_neck_scales_down():
    neck = SECONDFPN((4, 5), (3, 3), (0.5, 1))
    assert neck([torch.zeros(1, 4, 8, 8), torch.zeros(1, 5, 4, 4)]).shape == (1, 6, 4, 4)
    assert neck.deblocks[1][0].weight.shape == (3, 5, 1, 1)


def test_fuser_concatenates_in_order_and_trains():
    fuser = ConvFuser((2, 3), 4)
    first, second = torch.randn(2, 2, 5, 6), torch.randn(2, 3, 5, 6)
    expected = fuser[1](fuser[0](torch.cat([first, second], 1))).relu()
    torch.testing.assert_close(fuser([first, second]), expected)
    fuser([first, second]).sum().backward()
    assert fuser[0].weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"takes maps of \(2, 3\) channels, got \(3, 2\)"):
        fuser([second, first])


def test_number_of_stages_is_checked():
    with pytest.raises(ValueError, match="one entry per stage"):
        SECOND(4, (4, 8), (1,), (1, 2))
    with pytest.raises(ValueError, match="one entry per stage"):
        SECONDFPN((4, 8), (4,), (1, 2))
    with pytest.raises(ValueError, match="takes 2 maps, got 1"):
        SECONDFPN((4, 8), (4, 4), (1, 2))([torch.zeros(1, 4, 2, 2)])
