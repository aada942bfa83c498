"""What engine `torchtitan` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("torchtitan", several_ranks=True, environment="torchtitan")
