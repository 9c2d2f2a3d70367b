"""Pipelines whose bubbles run encoders: schedules, event simulation, filling, memory, published figures."""
