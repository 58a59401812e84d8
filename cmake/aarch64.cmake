# 64-bit ARM on another Linux machine: Debian's cross compiler, run under qemu-user with the
# libraries that cmake/aarch64-libraries unpacks.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(libraries ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64-libraries/root/usr/lib/aarch64-linux-gnu)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu -E
                                  LD_LIBRARY_PATH=${libraries})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
