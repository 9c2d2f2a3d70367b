"""Select the fastest variant by measuring in the user's own training steps; no torch, tested on a clock."""
