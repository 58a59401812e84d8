#include "topreduce/version.h"

namespace topreduce {

const char* version() {
  return TOPREDUCE_VERSION;
}

}  // namespace topreduce
