"""What engine `megatron` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("megatron", several_ranks=True, packed=False, tensor_parallel=True, environment="megatron")
