"""Speed, memory and scaling, measured as ratios within one interleaved run."""
