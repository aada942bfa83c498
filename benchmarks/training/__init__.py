"""Training measured against what people have without this server: transformers + peft in a loop of their own."""
