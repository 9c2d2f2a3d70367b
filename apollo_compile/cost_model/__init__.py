"""The cost model: work of segments after fusion, and a roofline for its duration."""
