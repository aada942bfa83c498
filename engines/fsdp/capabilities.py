"""What engine `fsdp` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("fsdp", several_ranks=True)
