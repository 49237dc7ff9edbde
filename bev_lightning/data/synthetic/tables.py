"""Fixed rows of the nuScenes tables, tokens, and the names of the official splits."""

import hashlib
from typing import Any

from bev_lightning.classes import ATTRIBUTES
from bev_lightning.data.synthetic.rig import list_channels, modality_of

Row = dict[str, Any]

LOCATION = "boston-seaport"  # one of the four locations of nuScenes

_CATEGORIES = (
    "human.pedestrian.adult",
    "human.pedestrian.child",
    "human.pedestrian.wheelchair",
    "human.pedestrian.stroller",
    "human.pedestrian.personal_mobility",
    "human.pedestrian.police_officer",
    "human.pedestrian.construction_worker",
    "animal",
    "vehicle.car",
    "vehicle.motorcycle",
    "vehicle.bicycle",
    "vehicle.bus.bendy",
    "vehicle.bus.rigid",
    "vehicle.truck",
    "vehicle.construction",
    "vehicle.emergency.ambulance",
    "vehicle.emergency.police",
    "vehicle.trailer",
    "movable_object.barrier",
    "movable_object.trafficcone",
    "movable_object.pushable_pullable",
    "movable_object.debris",
    "static_object.bicycle_rack",
)
_VISIBILITY = (("1", 0, 40), ("2", 40, 60), ("3", 60, 80), ("4", 80, 100))

# First and last scene number of each run in the official train and val splits.
_TRAIN = (
    "1-2 4-11 19-34 41-76 120-135 138-139 149-152 154-155 157-168 170-185 187-188 190-196 "
    "199-200 202-204 206-214 218-220 222-222 224-264 283-306 315-318 321-321 323-324 328-328 "
    "347-386 388-403 405-408 410-459 461-465 467-469 471-472 474-480 499-502 504-515 517-518 "
    "525-539 541-546 566-566 568-568 570-578 580-580 582-600 639-679 681-681 683-689 695-698 "
    "700-701 703-719 726-728 730-731 733-741 744-744 746-747 749-752 757-765 767-769 786-787 "
    "789-792 803-806 808-813 815-817 819-822 847-856 858-858 860-866 868-873 875-878 880-880 "
    "882-903 945-945 947-947 949-949 952-953 955-961 975-984 988-992 994-1025 1044-1058 "
    "1074-1102 1104-1110"
)
_VAL = (
    "3-3 12-18 35-36 38-39 92-110 221-221 268-278 329-332 344-346 519-524 552-565 625-627 "
    "629-630 632-638 770-771 775-775 777-778 780-784 794-800 802-802 904-917 919-931 962-963 "
    "966-969 971-972 1059-1073"
)
_MINI_TRAIN = "61-61 553-553 655-655 757-757 796-796 1077-1077 1094-1094 1100-1100"
_MINI_VAL = "103-103 916-916"


def official_scenes(version: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the train and the val scenes of ``v1.0-trainval`` or ``v1.0-mini``, in order."""
    train, val = {"v1.0-trainval": (_TRAIN, _VAL), "v1.0-mini": (_MINI_TRAIN, _MINI_VAL)}[version]
    return _expand(train), _expand(val)


def _expand(runs: str) -> tuple[str, ...]:
    bounds = [map(int, run.split("-")) for run in runs.split()]
    return tuple(f"scene-{n:04d}" for low, high in bounds for n in range(low, high + 1))


def make_token(*what: object) -> str:
    """Token of 32 hexadecimal digits, a hash of the arguments."""
    return hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=16).hexdigest()


def _make_row(table: str, key: str, **fields: object) -> Row:
    return {"token": make_token(table, key), **fields}


def fixed_tables(rig: str) -> dict[str, list[Row]]:
    """Tables with the same rows in every data set of a rig."""
    return {
        "category": [
            _make_row("category", name, name=name, description=f"{name.split('.')[-1]}.")
            for name in _CATEGORIES
        ],
        "attribute": [
            _make_row("attribute", name, name=name, description=f"{name}.") for name in ATTRIBUTES
        ],
        "visibility": [
            {
                "token": token,
                "level": f"v{low}-{high}",
                "description": f"visibility of whole object is between {low} and {high}%",
            }
            for token, low, high in _VISIBILITY
        ],
        "sensor": [
            _make_row("sensor", channel, channel=channel, modality=modality_of(channel))
            for channel in list_channels(rig)
        ],
    }


def visibility_token(share: float) -> str:
    """Visibility token of a visible share 0..1."""
    return "1" if share <= 0.4 else "2" if share <= 0.6 else "3" if share <= 0.8 else "4"
