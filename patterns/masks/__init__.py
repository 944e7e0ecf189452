"""How the entries of a mask are worked out, and what is proven of them; `patterns/mask.py` names the result."""
