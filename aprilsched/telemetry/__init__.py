"""Listeners: parts that observe a run and never change it."""
