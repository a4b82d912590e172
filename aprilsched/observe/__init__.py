"""Reads run folders as figures, histories and pictures. It uses only files, and needs no engine and
no scheduler."""
