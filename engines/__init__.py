"""How it is computed: training engines, LoRA, losses, optimizers, sampling. Torch lives here and nowhere else."""
