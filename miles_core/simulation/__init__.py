"""Discrete-event simulation of schedules: the product's scheduler and buffer on a virtual clock."""
