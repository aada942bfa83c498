"""What engine `torch` can do."""

from engines.capabilities import Capabilities

CAPABILITIES = Capabilities("torch")
