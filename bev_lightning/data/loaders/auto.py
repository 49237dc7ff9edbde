"""``loader=auto``: chooses the fastest loader for the machine. Imports torch only to build it."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bev_lightning.data.loaders.image_cache import CacheKind
    from bev_lightning.data.loaders.protocol import Loader


def choose_loader(
    num_workers: int, prefetch: int, pin_memory: bool, image_cache: "CacheKind" = "none"
) -> "Loader":
    """Build the loader that was measured to be the fastest on this kind of machine.

    A run replaces this factory in its configuration by the choice that :func:`choose_loader_name`
    makes, so that ``resolved.yaml`` shows which loader it uses.

    Args:
        num_workers, prefetch, pin_memory: of the loader.
        image_cache: whether decoded images are to be kept, and where.
    """
    import torch

    if choose_loader_name(torch.cuda.is_available(), image_cache) == "dali_prefetch":
        from bev_lightning.data.loaders.dali import DaliLoader

        return DaliLoader(num_workers, prefetch, pin_memory, image_queue=8, cloud_queue=4)
    from bev_lightning.data.loaders.shared_memory import SharedMemoryLoader

    return SharedMemoryLoader(num_workers, prefetch, pin_memory)


def choose_loader_name(
    on_cuda: bool, image_cache: "CacheKind" = "none"
) -> Literal["dali_prefetch", "zero_copy"]:
    """Choose one of ``conf/loader/`` for ``loader=auto``.

    DALI decodes on the GPU. It has no image cache, and needs CUDA to be the faster one.
    """
    if on_cuda and image_cache == "none" and _has_dali():
        return "dali_prefetch"
    return "zero_copy"


def _has_dali() -> bool:
    try:
        return find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False
