# Compile options shared by every room, as an interface target, and the function that makes a room.
add_library(epd_options INTERFACE)
target_compile_options(epd_options INTERFACE
  -Wall -Wextra -Wshadow $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>
  -fvisibility=hidden $<$<BOOL:${EPD_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # At -O3 GCC 12 warns about std::string's own operator+ (GCC bug 105329).
  target_compile_options(epd_options INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-Wno-restrict>)
endif()
# A check that fails names its file from the source directory on, wherever it was built.
add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>)
if(EPD_SANITIZE)
  string(REPLACE ";" "," _epd_sanitize "${EPD_SANITIZE}")
  add_compile_options(-fsanitize=${_epd_sanitize} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${_epd_sanitize})
  # GCC warns that ThreadSanitizer does not model fences. Ours order accesses between processes, which it
  # does not see anyway; between threads of one process nothing rests on a fence.
  if(EPD_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>)
  endif()
endif()

# epd_room(<name> SOURCES ... [PUBLIC libs...] [PRIVATE libs...])
# A static library epd_<name> with the include directory <room>/include. Rooms see each other only
# through what they name here.
function(epd_room name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(epd_${name} STATIC ${ARG_SOURCES})
  target_include_directories(epd_${name} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/include PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(epd_${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE} epd_options)
endfunction()
