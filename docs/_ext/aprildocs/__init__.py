"""What the site generates from the code at build time, so that neither can drift from the other."""
