"""The only package that touches private APIs of torch: Dynamo's graphs, AOTAutograd, Inductor, tensor handles."""
