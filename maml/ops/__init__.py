"""Operations with the second derivatives that torch lacks; torch's functions stay the interface."""
