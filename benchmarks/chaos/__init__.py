"""Fault campaign: real studies that are killed, suspended or robbed of their disk at random moments, then resumed."""
