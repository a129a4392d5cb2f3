"""Thousands of generated rollouts through the call service, and a checker that recomputes what their records must say."""
