"""Reads run folders as figures, histories and pictures. Needs only files, neither an engine nor a
scheduler."""
