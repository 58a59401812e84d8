#pragma once

/// Marks what programs may link with; everything else stays hidden inside a shared library.
#define TOPREDUCE_API __attribute__((visibility("default")))
/// ... and so does the inside of what is marked.
#define TOPREDUCE_LOCAL __attribute__((visibility("hidden")))
