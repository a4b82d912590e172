"""Adapters for trainers, one module for each; a module is imported only by those who use it."""
