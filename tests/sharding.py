"""Models sharded over two ranks by accelerate and FSDP 2, on a CPU."""

import accelerate.state
from accelerate.utils import DistributedType

SHARDED = {
    "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPTNeoXLayer",
}  # fmt: skip


def shard_on_a_cpu() -> None:
    """Let accelerate shard models here too: it does so on GPUs only, torch on a CPU as well."""
    make_state = accelerate.state.AcceleratorState.__init__

    def make_sharded(self, *args, **kwargs):
        make_state(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, kwargs["fsdp_plugin"]

    accelerate.state.AcceleratorState.__init__ = make_sharded
