"""rollstream: the data layer between agents that act and a trainer that learns from exactly what they sampled."""

__version__ = "0.1.0"
