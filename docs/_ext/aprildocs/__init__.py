"""Generates parts of the site from the code at build time, so that both always agree."""
