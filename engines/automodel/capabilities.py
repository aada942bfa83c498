"""What engine `automodel` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("automodel", several_ranks=True, environment="automodel")
