"""The stages of the compiler, one per file, in pipeline order: capture, partition, cost, plan, sync, memory, emit."""
