"""Makes the cache of pages of a loaded model from its configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from cpmcu.engine.prefix.base import PageCache
from cpmcu.engine.prefix.cache import PrefixCache
from cpmcu.loading.host_memory import cache_bytes, swap_bytes

if TYPE_CHECKING:
    from cpmcu.config import EngineConfig
    from cpmcu.engine.prefix.disk_tier import DiskTier
    from cpmcu.loading.loader import LoadedModel

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20  # host memory that is reserved for reads from disk


def make_page_cache(loaded: LoadedModel, config: EngineConfig) -> PageCache:
    """The prefix cache, or one that holds nothing. Raises ValueError for an unusable folder."""
    from cpmcu import C

    is_cuda = loaded.engine.launch_ahead > 1
    swap = swap_bytes(config.swap_space, is_cuda=is_cuda)
    if not config.prefix_cache:
        return PageCache(loaded.engine, C.PAGE_SIZE, swap_bytes=swap)
    host_bytes = cache_bytes(config.prefix_cache_host_gb, is_cuda=is_cuda)
    disk = None
    if config.prefix_cache_dir is not None and len(loaded.engine.pages.windows) > 1:
        logger.warning(
            "the prefix cache keeps nothing on disk: the model has layers with a window, whose "
            "pages are not written to files"
        )
    elif config.prefix_cache_dir is not None:
        disk = _disk(loaded, config)
    if disk is not None:
        host_bytes = max(host_bytes, STAGING_BYTES)
    return PrefixCache(
        loaded.engine,
        C.PAGE_SIZE,
        host_bytes=host_bytes,
        swap_bytes=swap,
        decoded=config.prefix_cache_decoded,
        disk=disk,
    )


def _disk(loaded: LoadedModel, config: EngineConfig) -> DiskTier:
    from cpmcu import C
    from cpmcu.engine.prefix.disk import DiskStore
    from cpmcu.engine.prefix.disk_tier import DiskTier
    from cpmcu.engine.prefix.fingerprint import model_fingerprint

    assert config.prefix_cache_dir is not None
    engine, spec = loaded.engine, loaded.spec
    directories = [loaded.directory]
    if loaded.draft_directory is not None:
        directories.append(loaded.draft_directory)
    is_cuda = engine.launch_ahead > 1
    parts = {
        "build": xxhash.xxh3_128_hexdigest(Path(C.__file__).read_bytes()),
        "device": C.device_info(config.device_index)["name"] if is_cuda else "cpu",
        "dtype": spec.dtype,
        "fp8_kv_cache": spec.fp8_kv_cache,
        "layers": spec.layers,  # flags change the rule of sparse attention
        "rope": [spec.rope_attention_scaling, *spec.rope_inv_freq],
        "linear": [spec.linear_method, spec.linear_options, spec.linear_overrides],
        "modules": spec.module_options,
        "draft": [
            config.speculation.method,
            *map(config.speculation.options.get, ("draft_head_quant", "draft_quant")),
        ],
        "ranks": engine.num_ranks,
        "sizes": [engine.pages.page_bytes, engine.pages.slot_bytes],
    }
    fingerprint = model_fingerprint(directories, parts)
    store = DiskStore(
        Path(config.prefix_cache_dir).expanduser(),
        fingerprint,
        page_bytes=engine.pages.page_bytes,
        limit_bytes=int(config.prefix_cache_disk_gb * 1e9),
        state_bytes=engine.pages.slot_bytes,
    )
    return DiskTier(store)
