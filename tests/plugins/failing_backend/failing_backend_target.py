import os

from toolkit_lm.attention import AttentionBackend


class FailingBackend(AttentionBackend):
    @classmethod
    def refuses(cls, spec):
        return None if "FAILS_LATER" in os.environ else fail()

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    def build(self, batch):
        return fail()

    def write_kv(self, layer, k, v, kv_cache, slot_mapping):
        fail()

    def forward(self, layer, q, k, v, kv_cache, meta, out):
        fail()


def fail():
    raise RuntimeError("no such kernel")
