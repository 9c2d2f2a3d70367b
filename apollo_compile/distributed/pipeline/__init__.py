"""Pipelines with encoders in their bubbles: schedules, event simulation, filling and memory."""
