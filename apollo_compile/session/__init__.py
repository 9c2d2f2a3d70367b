"""The work while a model trains: run its graphs, observe them, plan them again, and compare their variants."""
