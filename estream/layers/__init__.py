"""The arithmetic of a prefill over loaded graphs: weights, activations, attention, experts, head."""
