import os

from toolkit_lm.attention import AttentionBackend


class FailingBackend(AttentionBackend):
    @classmethod
    def refuses(cls, spec):
        return None if "FAILS_LATER" in os.environ else fail()

    @classmethod
    def page_layout(cls, spec):
        return fail()

    def build(self, batch):
        return fail()

    def write_kv(self, call):
        fail()

    def forward(self, call):
        fail()


def fail():
    raise RuntimeError("no such kernel")
