"""What the decoder tests share: our decoder alone, LLVM's reading of the same bytes, and encodings to try."""
