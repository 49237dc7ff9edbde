"""Permitted values of single keys."""

import subprocess
import sys

import pytest

from bev_lightning.checks import CHOICES, NUMBERS, check_choice, check_number
from bev_lightning.errors import InputError


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("data.batch_size", 0, "data.batch_size=0 must be a whole number of at least 1; change"),
        ("data.batch_size", 1.5, "data.batch_size=1.5 must be a whole number"),
        ("data.batch_size", True, "data.batch_size=true must be a whole number"),
        ("data.batch_size", None, "data.batch_size=null must be a whole number"),
        ("data.cache_gib", float("nan"), "data.cache_gib=nan must be a number of at least 0"),
    ],
)
def test_numbers(key: str, value: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        check_number(key, value)


def test_exceptions_of_numbers() -> None:
    check_number("hardware.devices", "auto")
    check_number("trainer.max_epochs", None)
    for key, rule in NUMBERS.items():
        check_number(key, rule.kind(rule.at_least))


def test_choices() -> None:
    for key, choices in CHOICES.items():
        for value in choices:
            check_choice(key, value)
    with pytest.raises(InputError, match="pin_memory=1 is unknown; use loader.pin_memory=auto, tr"):
        check_choice("loader.pin_memory", 1)


def test_validation_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from bev_lightning.config import compose, program, validate\n"
        "validate.check_config(compose.load_config('train'))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
