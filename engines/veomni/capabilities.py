"""What engine `veomni` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("veomni", several_ranks=True, environment="veomni")
