"""A stand-in for the kernels of xFormers that runs on a CPU: its masks, written out, and plain
torch."""

from __future__ import annotations

import torch
from toolkit_lm.attention import AttentionBackend
from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.backend import XformersBackend, lacks


def written_out(mask, num_queries: int, num_keys: int) -> torch.Tensor:
    """[queries, keys] bool: what a query sees of the keys as they lie, which for pages is the whole
    cache."""
    tables = getattr(mask, "block_tables", None)
    if tables is None:
        return mask.materialize((num_queries, num_keys)) == 0
    seen = mask.materialize((num_queries, tables.numel() * mask.page_size)) == 0
    return torch.nn.functional.pad(seen, (0, num_keys - seen.shape[1]))


def attend(q, k, v, mask, scale):
    seen = written_out(mask, q.shape[1], k.shape[1])
    scores = torch.einsum("bqghd,bkghd->bghqk", q.float(), k.float()) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    # A value that is NaN counts for nobody who does not see it; whoever sees it gets NaN from its
    # key.
    return torch.einsum("bghqk,bkghd->bqghd", weights, v.float().nan_to_num()).to(q.dtype)


def backend_of(page_size: int | None) -> type[AttentionBackend]:
    """The backend with that attention, on a CPU; it reads blocks that are multiples of page_size as
    pages."""

    class StandIn(XformersBackend):
        @classmethod
        def refuses(cls, spec):
            return (
                "written out masks are for a CPU"
                if spec.device != "cpu"
                else kernel.missing() or lacks(spec)
            )

        attend = staticmethod(attend)
        reads_pages = staticmethod(
            lambda block_size: bool(page_size and block_size and block_size % page_size == 0)
        )

    return StandIn
