"""How far one control plane goes: many training runs and waiting futures, on engines that compute next to nothing."""
