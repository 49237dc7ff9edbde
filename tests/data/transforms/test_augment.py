"""Augmentation matrices: where single pixels and points go."""

import numpy as np
import pytest

from bev_lightning.data.transforms.augment import (
    Augment,
    eval_image_transform,
    image_transform,
    random_bev_transform,
    random_image_transform,
)
from bev_lightning.errors import InputError

NONE = Augment(
    image_scale=(1, 1),
    image_flip=0.0,
    image_rotate_deg=(0, 0),
    bev_rotate_deg=(0, 0),
    bev_scale=(1, 1),
    bev_flip_x=0.0,
    bev_flip_y=0.0,
    bev_translate_std_m=(0, 0, 0),
)


def at(matrix: np.ndarray, u: float, v: float) -> list[float]:
    return (matrix @ [u, v, 1])[:2].tolist()


def test_fit_covers_the_width_and_keeps_the_bottom() -> None:
    matrix = eval_image_transform(
        (900, 1600), (256, 704)
    )  # scale 0.44: 396 x 704, 140 rows off the top
    assert at(matrix, -0.5, 899.5) == pytest.approx([-0.5, 255.5])
    assert at(matrix, 1599.5, 899.5) == pytest.approx([703.5, 255.5])
    assert at(matrix, -0.5, 140 / 0.44 - 0.5) == pytest.approx([-0.5, -0.5])
    # A flat target: the height decides and the middle of the width is kept.
    matrix = eval_image_transform((90, 160), (45, 40))
    assert at(matrix, 79.5, 44.5) == pytest.approx([19.5, 22.0])


def test_flip_and_rotation_leave_the_centre() -> None:
    size = (50, 100)
    flip = image_transform(size, size, (0, 0), size, flip=True)
    assert at(flip, 0, 7) == [99, 7]
    turned = image_transform(size, size, (0, 0), size, angle=np.pi / 2)
    assert at(turned, 49.5, 24.5) == pytest.approx([49.5, 24.5])
    assert at(turned, 59.5, 24.5) == pytest.approx([49.5, 14.5])  # right goes up: counter-clockwise


def test_no_augmentation_is_the_evaluation_crop() -> None:
    rng = np.random.default_rng(0)
    drawn = random_image_transform(NONE, rng, (900, 1600), (256, 704))
    np.testing.assert_allclose(drawn, eval_image_transform((900, 1600), (256, 704)))
    np.testing.assert_array_equal(random_bev_transform(NONE, rng), np.eye(4))


def test_bev_rotates_then_scales_then_shifts_then_flips() -> None:
    augment = Augment(
        bev_rotate_deg=(90, 90),
        bev_scale=(2, 2),
        bev_flip_x=1.0,
        bev_flip_y=0.0,
        bev_translate_std_m=(0, 0, 0),
    )
    matrix = random_bev_transform(augment, np.random.default_rng(0))
    np.testing.assert_allclose(matrix @ [1, 2, 3, 1], [4, 2, 6, 1], atol=1e-12)
    shifted = random_bev_transform(Augment(bev_translate_std_m=(1, 0, 0)), np.random.default_rng(0))
    assert shifted[0, 3] != 0 and shifted[1, 3] == 0


def test_draws_stay_in_their_limits_and_do_not_depend_on_other_settings() -> None:
    augment = Augment()
    for seed in range(30):
        bev = random_bev_transform(augment, np.random.default_rng(seed))
        assert 0.9 <= abs(np.linalg.det(bev)) ** (1 / 3) <= 1.1
        image = random_image_transform(
            augment, np.random.default_rng(seed), (900, 1600), (256, 704)
        )
        assert 0.38 - 1e-3 <= abs(np.linalg.det(image[:2, :2])) ** 0.5 <= 0.55 + 1e-3
    one, two = np.random.default_rng(1), np.random.default_rng(1)
    random_bev_transform(augment, one), random_bev_transform(NONE, two)
    (
        random_image_transform(augment, one, (90, 160), (32, 64)),
        random_image_transform(NONE, two, (90, 160), (32, 64)),
    )
    assert one.uniform() == two.uniform()


def test_nonsense_is_refused() -> None:
    with pytest.raises(InputError, match=r"image_scale=\[2.0, 1.0\] is no range"):
        Augment(image_scale=(2, 1))
    with pytest.raises(InputError, match="must be positive"):
        Augment(bev_scale=(0, 1))


def test_evaluation_scale_of_the_published_bevfusion():
    """1600 x 900 at 0.48 is 768 x 432, of which the middle 704 and the bottom 256 are taken."""
    pixel_map = eval_image_transform((900, 1600), (256, 704), 1.0909)
    assert pixel_map[0, 0] == pytest.approx(0.48, abs=1e-6)
    assert pixel_map[1, 1] == pytest.approx(0.48, abs=1e-6)
    assert pixel_map[:2, 2] == pytest.approx([0.24 - 0.5 - 32, 0.24 - 0.5 - 176], abs=1e-6)
