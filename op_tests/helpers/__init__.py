"""What the tests share: cases, references, assemblers, stand-ins and witnesses."""
