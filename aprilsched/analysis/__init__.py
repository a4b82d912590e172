"""Reading run folders: figures, histories, pictures. Files only; no engine, no scheduler."""
