"""How the processes of a run start, meet, watch each other, and end."""
