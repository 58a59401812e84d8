# cmake -P docs/site/make.cmake: the pages in docs/ and the reference of all public headers, with a
# search box, into build/docs. Links and pictures that lead nowhere fail.
cmake_minimum_required(VERSION 3.25)
get_filename_component(PROJECT_SOURCE_DIR ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
set(site ${PROJECT_SOURCE_DIR}/build/docs)
find_program(python python3 REQUIRED)

file(STRINGS ${PROJECT_SOURCE_DIR}/CMakeLists.txt line REGEX "^project\\(topreduce VERSION")
string(REGEX MATCH "[0-9.]+" PROJECT_VERSION "${line}")

include(${PROJECT_SOURCE_DIR}/topreduce/public_headers.cmake)
set(inputs "")
foreach(page index pytorch auto accelerators cpp python results reliability security torchft algorithms evidence lab architecture
             wire glossary) # in the order of the side bar
  string(APPEND inputs " ${PROJECT_SOURCE_DIR}/docs/${page}.md")
endforeach()
foreach(header ${public_headers} ${public_mpi_headers})
  string(APPEND inputs " ${PROJECT_SOURCE_DIR}/topreduce/${header}")
endforeach()

file(REMOVE_RECURSE ${site})
file(COPY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${site} FILES_MATCHING PATTERN *.cpp
                                                                    PATTERN *.py PATTERN *.h)
file(COPY ${PROJECT_SOURCE_DIR}/docs/evidence DESTINATION ${site} FILES_MATCHING PATTERN *.svg)

file(GLOB examples LIST_DIRECTORIES false RELATIVE ${site}/examples ${site}/examples/*)
list(TRANSFORM examples REPLACE "(.+)" "<li><a href=\"\\1\">\\1</a></li>")
list(JOIN examples "\n" examples)
file(WRITE ${site}/examples/index.html
     "<!DOCTYPE html>\n<title>Examples</title>\n<h1>Examples</h1>\n<ul>\n${examples}\n</ul>\n")

configure_file(${CMAKE_CURRENT_LIST_DIR}/Doxyfile.in ${site}.doxyfile @ONLY)
execute_process(COMMAND doxygen ${site}.doxyfile COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${python} ${CMAKE_CURRENT_LIST_DIR}/links.py ${site} COMMAND_ERROR_IS_FATAL ANY)
