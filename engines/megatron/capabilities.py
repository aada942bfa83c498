"""What engine `megatron` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities(
    "megatron",
    several_ranks=True,
    many_adapters=False,  # a pass has one sequence
    packed=False,
    tensor_parallel=True,
    environment="megatron",
)
