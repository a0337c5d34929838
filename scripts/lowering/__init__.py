"""What the scripts about lowerings share: model shapes, and a cache of the compiler's reports."""
